from forkyard.cli import main

main()
