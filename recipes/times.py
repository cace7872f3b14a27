"""How long stages would take, from a short measurement of their models."""
