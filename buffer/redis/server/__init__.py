"""The Redis or Valkey server: the embedded one, access lists, and checks of a given one."""
