"""The facade for E2B's published SDKs.

facade      whose request it is: control plane, envd of a sandbox, or not ours
sandboxes   the control plane's sandboxes          snapshots   those of E2B
templates   built, tagged, found by name           recipes     what one is made of, as a spec
envd        what a client says to a sandbox: who may, and the plain HTTP routes
process, filesystem, watching                      the two Connect services
connect     the Connect protocol: unary calls, streams, errors
"""
