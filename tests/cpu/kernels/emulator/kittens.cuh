// In the place of ThunderKittens.
