"""What proposes tokens, and when it stops."""
