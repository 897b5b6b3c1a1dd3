"""Two trees of spd run side by side, and every difference of their answers."""
