"""Two trees of spd run side by side, and every difference in what they answer."""
