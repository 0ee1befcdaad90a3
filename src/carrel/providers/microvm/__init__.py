"""The microVM provider: sandboxes with a kernel of their own in a virtual machine of QEMU. No daemon."""
