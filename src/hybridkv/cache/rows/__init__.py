"""What a request holds, group by group, and what of it is published."""
