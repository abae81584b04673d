"""The wire contract of Freestyle's clients, v1: `freestyle` and `freestyle-sandboxes` 0.1 on npm.

facade    whose request it is, who may, what is said when it goes wrong
routes    the table: method, path, handler, and what an identity needs for it
vms, snapshots, specs, inside, terminals, systemd, git…    the handlers, by what they are about
"""
