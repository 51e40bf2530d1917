"""The router's choice: which experts a token goes to, and with what weights."""
