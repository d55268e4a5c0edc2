// The daemon of stargz-snapshotter: Debian 12 has its libraries, and no program made of them but
// ctr-remote. As the project's own daemon it has containerd's proxy plugin ask it for snapshots; its
// configuration is the default one.
//
//	stargz SOCKET FOLDER
package main

import (
	"context"
	"log"
	"net"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"

	snapshotsapi "github.com/containerd/containerd/api/services/snapshots/v1"
	"github.com/containerd/containerd/contrib/snapshotservice"
	"github.com/containerd/containerd/reference"
	"github.com/containerd/containerd/remotes/docker"
	"github.com/containerd/stargz-snapshotter/fs"
	"github.com/containerd/stargz-snapshotter/fs/config"
	"github.com/containerd/stargz-snapshotter/fs/source"
	"github.com/containerd/stargz-snapshotter/snapshot"
	"github.com/hashicorp/go-retryablehttp"
	"google.golang.org/grpc"
)

// Registries without encryption, as they are on loopback.
func hosts(ref reference.Spec) ([]docker.RegistryHost, error) {
	client := retryablehttp.NewClient()
	client.Logger = nil
	return []docker.RegistryHost{{
		Client:       client.StandardClient(),
		Host:         ref.Hostname(),
		Scheme:       "http",
		Path:         "/v2",
		Capabilities: docker.HostCapabilityPull | docker.HostCapabilityResolve,
	}}, nil
}

// The labels of ctr-remote, by those with which CRI says the same.
var labelsOfCRI = map[string]string{
	"containerd.io/snapshot/remote/stargz.reference": "containerd.io/snapshot/cri.image-ref",
	"containerd.io/snapshot/remote/stargz.digest":    "containerd.io/snapshot/cri.layer-digest",
	"containerd.io/snapshot/remote/stargz.layers":    "containerd.io/snapshot/cri.image-layers",
}

// Finds a layer by the labels of either client. The project's own daemon does so in a package that
// Debian's packages cannot compile, for lack of Kubernetes' libraries.
func fromLabels(labels map[string]string) ([]source.Source, error) {
	all := map[string]string{}
	for label, value := range labels {
		all[label] = value
	}
	for label, cri := range labelsOfCRI {
		if value, has := labels[cri]; has {
			all[label] = value
		}
	}
	return source.FromDefaultLabels(hosts)(all)
}

func serve(socket, folder string) error {
	layers, err := fs.NewFilesystem(filepath.Join(folder, "stargz"), config.Config{},
		fs.WithGetSources(fromLabels))
	if err != nil {
		return err
	}
	snapshots, err := snapshot.NewSnapshotter(context.Background(),
		filepath.Join(folder, "snapshotter"), layers, snapshot.AsynchronousRemove)
	if err != nil {
		return err
	}
	listener, err := net.Listen("unix", socket)
	if err != nil {
		return err
	}
	server := grpc.NewServer()
	snapshotsapi.RegisterSnapshotsServer(server, snapshotservice.FromSnapshotter(snapshots))
	ended := make(chan os.Signal, 1)
	signal.Notify(ended, syscall.SIGTERM)
	go func() {
		<-ended
		server.Stop()
	}()
	if err := server.Serve(listener); err != nil {
		return err
	}
	// Unmounts the layers.
	return snapshots.Close()
}

func main() {
	if err := serve(os.Args[1], os.Args[2]); err != nil {
		log.Fatal(err)
	}
}
