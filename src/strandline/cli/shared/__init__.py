"""Parts that all commands share: opening logs, options, output."""
