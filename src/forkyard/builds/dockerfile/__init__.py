"""Dockerfiles: read (`parser`, `words`), and turned into stages of steps (`stages`). No I/O.

What is copied, and from where, is `builds.copying`'s; what an image says of itself is the host's.
"""
