"""Create a machine, run a program in it, get its result, throw the machine away."""

from forkyard import Forkyard

with Forkyard() as fy, fy.sandboxes.create() as sbx:
    sbx.files.write("/root/primes.py", "print([n for n in range(2, 50) if all(n % d for d in range(2, n))])\n")
    result = sbx.exec("python3 primes.py", timeout_s=60, check=True)
    print(f"{sbx.id} says {result.stdout.strip()} after {result.duration_ms:.0f} ms")
