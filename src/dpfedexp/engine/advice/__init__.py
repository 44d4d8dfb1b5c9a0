"""What a run says about itself: before it, from public numbers alone; during it, from what is released anyway."""
