"""What both ends of a connection share: messages of Flight, streams, commands, errors."""
