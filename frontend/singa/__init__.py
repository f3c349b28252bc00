"""What a person writes against."""
