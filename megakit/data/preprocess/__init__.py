"""From text files to indexed tokens, with several worker processes."""
