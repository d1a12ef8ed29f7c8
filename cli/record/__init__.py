"""What the commands over the record (`explain`, `verify`, `replay`) share."""
