"""The experiments of the papers, on a pair of one's own."""
