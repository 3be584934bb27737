"""Loss scaling from gradient histograms. None in this release: the room is kept."""
