"""The checker that the import hook applies to every annotated function and module."""

from beartype import BeartypeConf, beartype

# The numeric tower: an int is accepted for a float, as in `dropout=0`.
typechecker = beartype(conf=BeartypeConf(is_pep484_tower=True))
