"""What goes over the wire: the HTTP dialects, their errors, and messages between server and core."""
