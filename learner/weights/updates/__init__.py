"""Updates to versions: what has changed since the one before, and the form in which it travels.

form          The form in which a version travels to the members of a group
sparse_chain  Chain of sparse updates between the last versions
"""
