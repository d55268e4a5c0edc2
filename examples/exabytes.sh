#!/bin/bash
# A file system with 4 EiB to map into: files appear from its start, its middle and its end, hold the
# right bytes, cost next to nothing, and survive the death of the server and another mount.
#
#   examples/exabytes.sh FOLDER        FOLDER: empty, to mount on; needs root, od and btrfs-progs
set -euo pipefail

burgeon=${BURGEON:-burgeon}
at=$1
gib=$((1 << 30))
size=$((4 << 60))

fail() {
    echo "exabytes: $*" >&2
    exit 1
}

# Block $2 of file $1, past the page cache: a computed block holds its number.
check() {
    local found
    found=$(dd if="$at/$1" bs=4096 skip="$2" count=1 iflag=direct status=none | od -An -tu8 -j8 -N8)
    [ "$((found))" = "$2" ] || fail "block $2 of $1 says $((found))"
}

check_all() {
    for file in start middle huge end; do
        local blocks=$(($(stat -c %s "$at/$file") / 4096))
        check "$file" 0
        check "$file" $((blocks / 2))
        check "$file" $((blocks - 1))
    done
    [ "$(sha256sum < "$at/local")" = "$local_sum" ] || fail "local data has changed"
    echo "$1: all bytes are right"
}

map() {
    "$burgeon" map "$at/$1" --computed block-number --size "$2"
}

# Bytes that are used, of data and metadata.
used() {
    local sum=0 bytes
    for bytes in $(btrfs filesystem df --raw "$at" | sed -n 's/.*used=//p'); do
        sum=$((sum + bytes))
    done
    echo "$sum"
}

"$burgeon" create-empty "$at" --writes exabytes --virtual 4E --write-limit 256M
trap '"$burgeon" umount "$at" && "$burgeon" writes rm exabytes' EXIT

map start $((5 * gib))
map middle $((size - (5 + 120 + 64) * gib))
sync -f "$at"
before=$(used)
map huge $((120 * gib))
sync -f "$at"
cost=$(($(used) - before))
[ "$cost" -lt 10000000 ] || fail "120 GiB cost $cost bytes"
echo "120 GiB appeared and cost $cost bytes"
map end $((64 * gib))
if map more 4096 2>/dev/null; then
    fail "there is more than 4 EiB"
fi
head -c 1000000 /dev/urandom > "$at/local"
local_sum=$(sha256sum < "$at/local")
sync -f "$at"
[ "$(used)" -gt $((before + 900000)) ] || fail "local data is not counted"
check_all "mapped"

kill -9 "$("$burgeon" status --json | sed -n 's/.*"server_pid": *\([0-9]*\).*/\1/p')"
check_all "server killed"

"$burgeon" umount "$at"
"$burgeon" create-empty "$at" --writes exabytes --virtual 4E
check_all "mounted again"
