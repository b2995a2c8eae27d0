"""Rails of our own: what one side asks the other for, as frames on an ordered stream of bytes."""
