package suite

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/containerd/containerd/v2/core/snapshots"
	"github.com/containerd/errdefs"
)

// What a client has been told of each snapshot.
type known map[string]snapshots.Kind

// A change, and what the client knows after it.
type change struct {
	what  string
	run   func(context.Context, snapshots.Snapshotter) error
	after known
}

// The next change of a random life: layers upon layers, and containers upon them.
func next(random *rand.Rand, now known, number int) change {
	after := maps.Clone(now)
	var active, committed []string
	for name, kind := range now {
		switch kind {
		case snapshots.KindActive:
			active = append(active, name)
		case snapshots.KindCommitted:
			committed = append(committed, name)
		}
	}
	name := fmt.Sprintf("default/%d/n", number)
	switch choice := random.Intn(5); {
	case choice == 0 && len(active) > 0:
		key := active[random.Intn(len(active))]
		delete(after, key)
		after[name] = snapshots.KindCommitted
		return change{"commit", func(ctx context.Context, all snapshots.Snapshotter) error {
			return all.Commit(ctx, name, key)
		}, after}
	case choice == 1 && len(active) > 0:
		key := active[random.Intn(len(active))]
		delete(after, key)
		return change{"remove", func(ctx context.Context, all snapshots.Snapshotter) error {
			return all.Remove(ctx, key)
		}, after}
	case choice == 2 && len(committed) > 0:
		after[name] = snapshots.KindView
		parent := committed[random.Intn(len(committed))]
		return change{"view", func(ctx context.Context, all snapshots.Snapshotter) error {
			_, err := all.View(ctx, name, parent)
			return err
		}, after}
	default:
		parent := ""
		if len(committed) > 0 {
			parent = committed[random.Intn(len(committed))]
		}
		after[name] = snapshots.KindActive
		return change{"prepare", func(ctx context.Context, all snapshots.Snapshotter) error {
			_, err := all.Prepare(ctx, name, parent)
			return err
		}, after}
	}
}

// The snapshotter is killed at random moments, and has afterwards what it answered; the call that
// was not answered happened as a whole or not at all. Each mount that it gives has its folders.
func TestKilled(t *testing.T) {
	seed := time.Now().UnixNano()
	if given, err := strconv.ParseInt(os.Getenv("SUITE_SEED"), 10, 64); err == nil {
		seed = given
	}
	t.Logf("SUITE_SEED=%d", seed)
	random := rand.New(rand.NewSource(seed))
	root, ctx, number, kills := t.TempDir(), context.Background(), 0, 0
	now := known{}
	for round := 0; round < 25; round++ {
		all, kill, err := start(ctx, root)
		if err != nil {
			t.Fatal(err)
		}
		found := known{}
		err = all.Walk(ctx, func(_ context.Context, info snapshots.Info) error {
			found[info.Name] = info.Kind
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
		if !maps.Equal(found, now) {
			t.Fatalf("round %d: the snapshots are %v, not %v", round, found, now)
		}
		for name, kind := range now {
			if kind == snapshots.KindCommitted {
				continue
			}
			mounts, err := all.Mounts(ctx, name)
			if err != nil {
				t.Fatal(name, err)
			}
			for _, mount := range mounts {
				checkFolders(t, mount.Source, mount.Options)
			}
		}
		calls := random.Intn(6)
		delay := time.Duration(random.Intn(6000)) * time.Microsecond
		begun, killed := make(chan struct{}), make(chan struct{})
		go func() {
			<-begun
			time.Sleep(delay)
			_ = kill()
			close(killed)
		}()
		for call := 0; ; call++ {
			number++
			if call == calls {
				close(begun)
			}
			step := next(random, now, number)
			limited, cancel := context.WithTimeout(ctx, 20*time.Second)
			err := step.run(limited, all)
			cancel()
			if err == nil {
				now = step.after
				continue
			}
			if !errdefs.IsUnavailable(err) && !errdefs.IsCanceled(err) && !errors.Is(err, context.Canceled) {
				t.Fatalf("%s: %v", step.what, err)
			}
			<-killed
			kills++
			now = settled(t, ctx, root, now, step)
			break
		}
	}
	if kills != 25 {
		t.Fatalf("%d kills", kills)
	}
}

// The state after a change that was not answered: as before it, or as after it.
func settled(t *testing.T, ctx context.Context, root string, before known, step change) known {
	all, end, err := start(ctx, root)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = end() }()
	found := known{}
	err = all.Walk(ctx, func(_ context.Context, info snapshots.Info) error {
		found[info.Name] = info.Kind
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if !maps.Equal(found, before) && !maps.Equal(found, step.after) {
		t.Fatalf("a %s was done by half: %v, neither %v nor %v", step.what, found, before, step.after)
	}
	return found
}

func checkFolders(t *testing.T, source string, options []string) {
	if source != "overlay" {
		if _, err := os.Stat(source); err != nil {
			t.Fatal(err)
		}
		return
	}
	for _, option := range options {
		for _, folder := range folders(option) {
			if _, err := os.Stat(folder); err != nil {
				t.Fatal(err)
			}
		}
	}
}

// The folders that an option of overlayfs names.
func folders(option string) []string {
	name, value, _ := strings.Cut(option, "=")
	switch name {
	case "lowerdir", "upperdir", "workdir":
		return strings.Split(value, ":")
	}
	return nil
}
