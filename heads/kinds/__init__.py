"""The kinds of acceptance heads, one a file: what it reads, its form, and how it is asked fast.

`heads.config.HEAD_KINDS` names them and says how each is trained. A saved head carries its kind's
file.
"""
