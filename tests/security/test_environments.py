"""Attacks on the Python environments that sandboxes share, and on the launchers every sandbox has."""


def test_listing_the_shelf(attacker):
    """Find the environments of others: by listing, through another name of the directory, by its links."""

    def attack():
        import os

        from inside import first_that_works

        def listed(path):
            return lambda: os.listdir(path) or "an empty listing"

        places = ("/envs", "/envs/", "/envs/.", "/proc/self/root/envs", "/proc/1/root/envs")
        if not os.path.isdir("/envs"):
            return "there is nothing to attack"
        return first_that_works(*(listed(each) for each in places))

    attacker.attempt(attack)


def test_writing_to_the_shelf(attacker):
    """Plant, change or unlock something there."""

    def attack():
        import os

        from inside import first_that_works

        def made(path):
            def act():
                with open(path, "w"):
                    return path

            return act

        if not os.path.isdir("/envs"):
            return "there is nothing to attack"
        places = ("/envs/x", "/etc/carrel/bin/pip", "/etc/carrel/tools/uv", "/etc/carrel/python/pip/__init__.py")
        return first_that_works(
            *(made(each) for each in places),
            lambda: os.chmod("/envs", 0o777) or "chmod",
            lambda: os.mkdir("/envs/y") or "mkdir",
            lambda: os.rename("/envs", "/envs2") or "rename",
            lambda: os.unlink("/etc/carrel/tools/uv") or "unlink",
        )

    attacker.attempt(attack)
