"""The fault drill: break runs on purpose, and check their recovery."""
