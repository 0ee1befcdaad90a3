"""The gVisor provider: sandboxes whose kernel is a program, `runsc`. No daemon."""
