"""Rails with aiote's own protocol: requests and answers as frames on an ordered stream of bytes."""
