"""What S3 offers beyond files: conditions, checksums and multipart uploads."""
