"""What the user asks for: frozen values."""
