"""Fixtures that several files here use."""

from stores import s3 as s3  # a real S3 server on this machine
