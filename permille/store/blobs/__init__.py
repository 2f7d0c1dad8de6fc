"""Where the cloud's blobs lie: a folder, or a bucket behind one."""
