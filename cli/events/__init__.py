"""What `vertumnus events` is made of: following the stream, finding in the record, printing."""
