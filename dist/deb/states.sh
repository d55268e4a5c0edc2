# Begins each maintainer script: the state directories in use, and the mounts in them.

PROGRAM=/usr/bin/burgeon
STATE=/var/lib/burgeon

# The state directories of root, one a line: the default one, those of the configuration and of units of `mount
# --persist`, and those of running daemons.
states() {
    {
        [ ! -d "$STATE" ] || echo "$STATE"
        sed -n 's/^[[:space:]]*state-dir[[:space:]]*=[[:space:]]*["'"'"']\([^"'"'"']*\)["'"'"'].*/\1/p' \
            /etc/burgeon/config.toml /etc/burgeon/config.d/*.toml 2> /dev/null || true
        for unit in /etc/systemd/system/*.mount; do
            [ -f "$unit" ] && grep -qs '^# Written by .burgeon mount --persist' "$unit" || continue
            sed -n 's/^Options=.*state-dir=\([^,"]*\).*/\1/p' "$unit"
        done
        # One process asks for all: a shell that asked for each would take seconds.
        find /proc/[0-9]*/exe -maxdepth 0 \( -lname "$PROGRAM" -o -lname "$PROGRAM (deleted)" \) \
            -printf '%h\n' 2> /dev/null | while read -r process; do
            # `@burgeon __supervise DIR`, `@burgeon __serve DIR`
            tr '\0' '\n' 2> /dev/null < "$process/cmdline" | sed -n '2{/^__\(supervise\|serve\)$/!q};3p'
        done || true
    } | sort -u | while read -r state; do
        # Any user's process may be among them, and its arguments are that user's word: a path that
        # would be an option of find, or a folder in which others can put theirs, is none of root's.
        case $state in
            /*) [ -z "$(find "$state" -maxdepth 0 -type d -user root ! -perm /022 2> /dev/null)" ] || echo "$state" ;;
        esac
    done
}

# The mounts of the state directory $1, one a line. The kernel is asked, so a dead daemon's count, too.
mounts() {
    for record in "$1"/mounts/*/mount.json; do
        [ -f "$record" ] || continue
        fsid=$(sed -n 's/^  "fsid": "\(.*\)",\{0,1\}$/\1/p' "$record")
        [ -n "$fsid" ] && [ -d "/sys/fs/btrfs/$fsid" ] || continue
        sed -n 's/^  "target": "\(.*\)",\{0,1\}$/\1/p' "$record"
    done
}

# The devices of `burgeon accelerate` in the state directory $1, which a process serves, one a line; and those
# that are not served, but of which a cache has newer content.
accelerated() {
    for cache in "$1"/accelerate/*/; do
        [ -d "$cache" ] || continue
        name=${cache%/}
        name=${name##*/}
        # `@burgeon __accelerate-supervise FOLDER`; the pattern is no argument that grep would find in itself.
        if printf '%s\n' "${cache%/}" | grep -qsFx --null-data -f - /proc/[0-9]*/cmdline; then
            echo "the cache $name has attached devices"
        fi
        for dirty in "$cache"dirty/*; do
            [ ! -f "$dirty" ] || echo "the cache $name has content of ${dirty##*/} that its slow device lacks"
        done
    done
}

# systemctl, on a machine that systemd runs. What fails keeps no package.
ask_systemd() {
    [ ! -d /run/systemd/system ] || systemctl "$@" || true
}
