# make demo    shows Burgeon on a real tree of this machine (as root or with sudo)
# make check   format, lints, unit, property and simulation tests: minutes, and no root
# make test    everything that has to hold: format, lints, all tests, licences, a bounded fuzz run
# make soak    first what takes too long for `make test`: try-tarball, check-arm64, and the kernel tests once
#              more over ublk and on Linux 6.1, in an emulator; then an hour of random deaths, damage, full
#              disks and failing sources (SOAK='--minutes 5 --seed 1'), and twenty mounts into each of which
#              4 GiB are written as quickly as they go (ROUNDS=20); then a minute of reads from a cache on
#              each small file system, whose server is killed, and one more beside a filler of that disk;
#              and file systems on accelerated devices, verified through as many deaths and power cuts; then an accelerated
#              image of a Ceph, and its fail-over between two machines with Pacemaker
# make bench   the figures of the documents, as ratios to other programs on this machine
# make bench-start   the same for cold starts of real programs over a slow network: images of ours, and
#              OCI images beside stargz-snapshotter
# make bench-ublk    the same over ublk, in the lab
# make bench-static  the static program beside the usual one: reads of cached data
# make bench-accelerate   hit ratios of the policies of `burgeon accelerate`, beside RANDOM, LRU and the best possible
# make bench-containers   200 idle containers beside overlayfs: disk, memory, threads, devices, time to make and remove;
#              then pods beside overlayfs and stargz-snapshotter: cold starts over a slow network, warm starts,
#              the first write to a large file, 100 pods of one image. It fails if an aim is missed. ROUNDS=3
#              is the default; BENCH='--containers starts --programs node --pods 20' runs parts of the second
# make bench-cache   policies of eviction on traces of chunks, beside the best possible; BENCH=FILE adds a recorded
#              trace of block numbers (u32, little-endian); then the speed at which a cache gives space
#              back that others take, on ext4, XFS and btrfs
#
# make install put the command, mount(8)'s helper and the systemd unit in place (DESTDIR is honoured)
# make deb     a Debian package, in target/package
# make tarball the static program with its unit, configuration, man pages and completions, and SHA256SUMS, in target/package
# make check-arm64  compiles everything for arm64 (CI builds it there, on a machine of that kind)
# make try-tarball  runs its program in an empty chroot: names by DNS, TLS
# make lab     CMD='...' [KERNEL=6.1]: run a command as root on an older kernel, emulated
#
# Each installs the Debian packages it needs; a Rust toolchain has to be there (Rust
# 1.88 or newer, https://rustup.rs); for `make test` also Go 1.21 or newer (https://go.dev/dl), with which
# containerd's own tests and containerd 2.x are made.

CARGO ?= cargo
SUDO := $(if $(filter 0,$(shell id -u)),,sudo)
TARGET := $(or $(CARGO_TARGET_DIR),target)

# Needed to compile: a C compiler, for zstd, BLAKE3 and lzma.
BUILD_NEEDS := cc=gcc /usr/include/stdio.h=libc6-dev
# Needed to package: a stripper, the versions of libraries, a checker.
DEB_NEEDS := git=git strip=binutils dpkg-shlibdeps=dpkg-dev lintian=lintian
# Needed by the tests: stock checkers, load, other people's tools to compare with.
TEST_NEEDS := $(BUILD_NEEDS) btrfs=btrfs-progs mkfs.xfs=xfsprogs fio=fio \
	debootstrap=debootstrap setfattr=attr setfacl=acl setcap=libcap2-bin losetup=mount unshare=util-linux xz=xz-utils zstd=zstd \
	/usr/share/keyrings/debian-archive-keyring.gpg=debian-archive-keyring \
	nginx=nginx-light umoci=umoci skopeo=skopeo busybox=busybox-static runc=runc crun=crun zsh=zsh fish=fish \
	podman=podman buildah=buildah bwrap=bubblewrap systemd-nspawn=systemd-container \
	docker-registry=docker-registry htpasswd=apache2-utils openssl=openssl systemd-analyze=systemd \
	sshd=openssh-server oathtool=oathtool /lib/x86_64-linux-gnu/security/pam_oath.so=libpam-oath \
	xmllint=libxml2-utils bsdtar=libarchive-tools mandoc=mandoc promtool=prometheus tmux=tmux containerd=containerd $(DEB_NEEDS)
BENCH_NEEDS := $(TEST_NEEDS) mksquashfs=squashfs-tools mkfs.erofs=erofs-utils \
	qemu-storage-daemon=qemu-system-common
# Of stargz-snapshotter Debian has the libraries, and not its daemon: that is compiled from them.
GO_LIBRARIES := /usr/share/gocode/src/github.com/containerd
START_NEEDS := $(BUILD_NEEDS) debootstrap=debootstrap nginx=nginx-light curl=curl zstd=zstd \
	pgrep=procps losetup=mount /usr/share/keyrings/debian-archive-keyring.gpg=debian-archive-keyring \
	umoci=umoci skopeo=skopeo docker-registry=docker-registry containerd=containerd \
	ctr-remote=stargz-snapshotter /usr/bin/go=golang-go \
	$(GO_LIBRARIES)/stargz-snapshotter=golang-github-containerd-stargz-snapshotter-dev

CEPH_NEEDS := ceph-mon=ceph-mon ceph-osd=ceph-osd rbd=ceph-common qemu-storage-daemon=qemu-system-common \
	/usr/lib/x86_64-linux-gnu/qemu/block-rbd.so=qemu-block-extra

LAB_NEEDS := qemu-system-x86_64=qemu-system-x86 /usr/lib/qemu/virtiofsd=qemu-system-common \
	busybox=busybox-static cpio=cpio depmod=kmod

.PHONY: demo check test soak bench bench-start bench-ublk bench-cache bench-containers bench-accelerate bench-static check-arm64 build install deb tarball try-tarball lab clean

demo: build
	dev/need $(if $(findstring --debian,$(DEMO)),debootstrap=debootstrap)
	$(SUDO) $(TARGET)/release/burgeon demo $(DEMO)

build:
	dev/need $(BUILD_NEEDS)
	$(CARGO) build --release --locked --package burgeon

check:
	dev/need $(BUILD_NEEDS)
	$(CARGO) run --quiet --locked --package xtask -- check

test:
	dev/need $(TEST_NEEDS)
	dev/go $(TARGET)/tools
	$(CARGO) run --quiet --locked --package xtask -- test $(addprefix --minutes ,$(MINUTES))

soak: check-arm64 try-tarball
	dev/need $(TEST_NEEDS) dmsetup=dmsetup
	CUTS=$(or $(CUTS),34) $(CARGO) run --quiet --locked --package xtask -- kernels
	$(SUDO) $(CARGO) run --quiet --locked --package xtask -- upgrade-from
	$(SUDO) $(CARGO) run --quiet --locked --package xtask -- torment $(or $(SOAK),--minutes 60)
	$(SUDO) ROUNDS=$(or $(ROUNDS),20) $(CARGO) test --release --locked --package burgeon --test writes -- \
		--exact default_mounts_take_four_gigabytes_each
	$(SUDO) ROUNDS=$(or $(ROUNDS),20) $(CARGO) test --release --locked --package burgeon --test accelerated_verify
	$(SUDO) CACHE_SECONDS=60 $(CARGO) test --release --locked --package burgeon --test cache -- \
		is_never_filled_beyond_the_floor
	$(SUDO) CACHE_SECONDS=60 $(CARGO) test --release --locked --package burgeon --test cache_filler
	dev/need $(CEPH_NEEDS) $(LAB_NEEDS)
	$(SUDO) $(CARGO) test --release --locked --package burgeon --test rbd
	$(CARGO) build --release --locked --package burgeon
	$(SUDO) $(CARGO) run --quiet --locked --package xtask -- fail-over --burgeon $(TARGET)/release/burgeon

bench: build
	dev/need $(BENCH_NEEDS)
	$(CARGO) build --release --locked --package xtask
	$(SUDO) $(TARGET)/release/xtask bench --burgeon $(TARGET)/release/burgeon $(BENCH)

bench-start: build
	dev/need $(START_NEEDS)
	$(CARGO) build --release --locked --package xtask
	$(SUDO) $(TARGET)/release/xtask bench --burgeon $(TARGET)/release/burgeon --only start \
		--start-tree $(TARGET)/tmp/start-bookworm $(BENCH)

STATIC := $(shell uname -m)-unknown-linux-musl
# Without rustup, dist/build says what is missing.
ADD_STATIC := if command -v rustup > /dev/null; then rustup target add $(STATIC); fi

bench-static: build
	dev/need $(BENCH_NEEDS) musl-gcc=musl-tools
	$(ADD_STATIC)
	$(CARGO) build --release --locked --package xtask
	$(SUDO) $(TARGET)/release/xtask bench --burgeon $(TARGET)/release/burgeon --only builds \
		--other "$$(dist/build $(STATIC))" $(BENCH)

# Compiles for another architecture, as far as that needs no linker.
check-arm64:
	dev/need aarch64-linux-gnu-gcc=gcc-aarch64-linux-gnu \
		/usr/aarch64-linux-gnu/include/stdio.h=libc6-dev-arm64-cross
	rustup target add aarch64-unknown-linux-gnu
	$(CARGO) check --workspace --locked --target aarch64-unknown-linux-gnu

# The guest sees this machine's programs; its own disk is its memory.
bench-ublk: build
	dev/need $(BUILD_NEEDS) $(LAB_NEEDS) fio=fio mkfs.btrfs=btrfs-progs \
		/usr/lib/llvm-14/lib/libclang.so=libclang-dev
	$(CARGO) build --release --locked --package xtask
	$(CARGO) build --release --locked --package burgeon-frontend --example ublk_zeros
	$(CARGO) install --quiet --locked --no-default-features --root $(TARGET)/tools rublk
	LAB_TIMEOUT=3600 LAB_MEMORY_MB=4096 dev/lab/run 6.12 "$$(realpath $(TARGET))/release/xtask" bench \
		--only ublk,ublk-queues --burgeon "$$(realpath $(TARGET))/release/burgeon" \
		--rublk "$$(realpath $(TARGET))/tools/bin/rublk" --file-mib 256 --seconds 1 $(BENCH)
	LAB_INIT=systemd LAB_DISK_MB=4096 LAB_TIMEOUT=1800 LAB_MEMORY_MB=4096 dev/lab/run 6.12 \
		"$$(realpath $(TARGET))/release/xtask" bench --only disk --disk /lab-disk \
		--burgeon "$$(realpath $(TARGET))/release/burgeon" --file-mib 256 --seconds 1 $(BENCH)

bench-cache:
	dev/need $(BUILD_NEEDS)
	$(CARGO) run --release --locked --quiet --package burgeon-cache --example policies -- $(BENCH)
	dev/need mkfs.btrfs=btrfs-progs mkfs.xfs=xfsprogs losetup=mount
	$(CARGO) build --release --locked --quiet --package burgeon-cache --example give_back
	$(SUDO) $(TARGET)/release/examples/give_back

bench-containers: build
	dev/need $(TEST_NEEDS) $(START_NEEDS) fincore=util-linux-extra
	dev/go $(TARGET)/tools
	$(SUDO) CONTAINERS=$(or $(CONTAINERS),200) $(CARGO) test --release --locked --package burgeon --test density -- --nocapture
	$(CARGO) build --release --locked --package xtask
	$(SUDO) $(TARGET)/release/xtask bench --burgeon $(TARGET)/release/burgeon --only containers --strict \
		--start-tree $(TARGET)/tmp/start-bookworm --disk $(TARGET)/tmp --rounds $(or $(ROUNDS),3) $(BENCH)

bench-accelerate:
	dev/need $(BUILD_NEEDS)
	$(CARGO) run --release --locked --quiet --package burgeon-accelerate --example hit_ratios $(BENCH)

# Where mount(8) looks for helpers: /sbin, which is a symlink on most machines.
SBIN ?= $(if $(wildcard /sbin/.),$(shell readlink -f /sbin),/sbin)

# By rename: a daemon may be started at any moment.
install: build
	$(SUDO) install -D $(TARGET)/release/burgeon $(DESTDIR)/usr/local/bin/.burgeon.new
	$(SUDO) mv $(DESTDIR)/usr/local/bin/.burgeon.new $(DESTDIR)/usr/local/bin/burgeon
	$(SUDO) install -d $(DESTDIR)$(SBIN)
	$(SUDO) ln -sfn /usr/local/bin/burgeon $(DESTDIR)$(SBIN)/mount.burgeon
	$(SUDO) install -D --mode=644 --target-directory=$(DESTDIR)/etc/systemd/system dist/burgeon.service \
		dist/burgeon-metrics.service dist/burgeon-snapshotter.service dist/burgeon-disks.service \
		dist/burgeon-disks.timer dist/burgeon-retry@.timer
	$(SUDO) install -D --mode=644 --target-directory=$(DESTDIR)/etc/udev/rules.d dist/65-burgeon.rules
	$(SUDO) install -D dist/ocf/accelerate $(DESTDIR)/usr/lib/ocf/resource.d/burgeon/accelerate
	$(if $(DESTDIR),,getent group burgeon > /dev/null || $(SUDO) groupadd --system burgeon)

deb:
	dev/need $(BUILD_NEEDS) $(DEB_NEEDS)
	package=$$(dist/deb/build) && dist/deb/check "$$package" && echo "$$package"

tarball:
	dev/need $(BUILD_NEEDS) git=git readelf=binutils musl-gcc=musl-tools
	$(ADD_STATIC)
	dist/tarball

# Runs the tarball's program where there is nothing else: DNS and TLS in an empty chroot.
try-tarball:
	dev/need $(BUILD_NEEDS) git=git readelf=binutils musl-gcc=musl-tools docker-registry=docker-registry \
		openssl=openssl
	$(ADD_STATIC)
	archive=$$(dist/tarball) && (cd "$$(dirname "$$archive")" && sha256sum --check SHA256SUMS) && \
		folder=$$(mktemp -d) && tar -xzf "$$archive" --strip-components=1 -C "$$folder" && \
		$(SUDO) env BURGEON_STATIC="$$folder/burgeon" $(CARGO) test --locked --package burgeon \
			--test empty_chroot; \
		status=$$?; rm -rf "$$folder"; exit $$status

KERNEL ?= 6.12
lab:
	dev/need $(LAB_NEEDS)
	dev/lab/run $(KERNEL) sh -c '$(CMD)'

clean:
	$(CARGO) clean
