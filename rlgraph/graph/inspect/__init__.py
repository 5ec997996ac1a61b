"""What a captured graph holds, in words and as a picture."""
