"""The commands, one file each: what they take, what they print. The work is done elsewhere."""
