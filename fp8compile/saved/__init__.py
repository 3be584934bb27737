"""How values that the forward saves for the backward are stored: decided once (``plan``), then done by passes."""
