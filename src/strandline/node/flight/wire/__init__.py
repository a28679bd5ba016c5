"""The wire protocol of client and server: messages of Flight, streams, commands, errors."""
