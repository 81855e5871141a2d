"""S3's own features: conditions, checksums and multipart uploads."""
