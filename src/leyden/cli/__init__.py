"""Layer 5: the ``leyden`` command."""
