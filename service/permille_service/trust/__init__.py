"""Trust metadata: it is stored, renewed, sent to devices, and accepted from holders of offline keys."""
