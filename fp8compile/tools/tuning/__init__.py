"""``fp8compile.tools.tune``: recipes measured side by side on the user's device, and the choice among them."""
