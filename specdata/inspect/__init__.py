"""`python -m specdata.inspect FOLDER`: what a stored dataset holds."""
