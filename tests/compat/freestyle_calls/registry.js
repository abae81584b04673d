// The list of calls, and what they share.
import assert from 'node:assert/strict'

export { assert }

// In the order they run: name, oldest version that has it, what is checked, and whether only a real machine can show it.
export const CALLS = []

export function call(name, check, { since = '0.1.46', vm = false } = {}) {
  assert(!CALLS.some(([known]) => known === name), name)
  CALLS.push([name, since, check, vm])
}

// What the calls share: the package, a client, one VM, and a directory in it.
export class Yard {
  constructor(sdk, version) {
    this.sdk = sdk
    this.version = version
    this.vm_tier = Boolean(process.env.COMPAT_VM)
    // Of its own also where versions share a daemon: what one has built is not built again for another.
    this.dir = this.vm_tier ? `/root/work-${version}` : process.env.COMPAT_DIR
    this.fs = new sdk.Freestyle()
    this.vm = null
    this.vmId = null
  }

  path(name) {
    return `${this.dir}/${name}`
  }

  // By the version of the package.
  newerThan(version) {
    return older(version, this.version)
  }
}

export function older(one, other) {
  const [a, b] = [one, other].map((version) => version.split('.').map(Number))
  for (let n = 0; n < 3; n++) if ((a[n] ?? 0) !== (b[n] ?? 0)) return (a[n] ?? 0) < (b[n] ?? 0)
  return false
}

// An error whose code the client knew, or, where it has no classes of its own, said.
export async function fails(code, work) {
  try {
    await work()
  } catch (error) {
    assert(String(error.message).includes(code), `${error.message} instead of ${code}`)
    assert(!String(error.message).includes('Unknown error code'), error.message)
    return error
  }
  throw new Error(`${code} was not thrown`)
}

export async function until(condition, seconds = 10) {
  const end = Date.now() + seconds * 1000
  while (!(await condition())) {
    assert(Date.now() < end, 'it did not come true in time')
    await new Promise((done) => setTimeout(done, 20))
  }
}
