"""Read allocator histories safely, replay them and split memory by category, without torch."""
