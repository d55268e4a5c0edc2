// What a kubelet asks of a containerd over CRI, as a command for tests. crictl is no Go module.
//
//	cri SOCKET pull IMAGE             prints the image's id
//	cri SOCKET run NAME IMAGE WORD…   a pod of one container on the host's network; prints the ids of both
//	cri SOCKET time NAME IMAGE PULL USER READY WORD…
//	                                  the same, until the log has READY or, if that is empty, the container has
//	                                  ended well; prints the seconds of each call as JSON; pulls if PULL is "pull"
//	cri SOCKET exec CONTAINER WORD…   prints the output; the exit code is that of the command
//	cri SOCKET remove POD             stops and removes a pod and its containers
//	cri SOCKET remove-image IMAGE
//	cri SOCKET pods                   a line for each pod: its id
//	cri SOCKET usage                  a line: bytes of the image file system; then one for each container
package main

import (
	"context"
	"fmt"
	"os"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// The longest call, on a loaded machine.
const limit = 120 * time.Second

type client struct {
	images cri.ImageServiceClient
	pods   cri.RuntimeServiceClient
}

func main() {
	if len(os.Args) < 3 {
		fmt.Fprintln(os.Stderr, "usage: cri SOCKET CALL WORD…")
		os.Exit(2)
	}
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	connection, err := grpc.NewClient("unix://"+os.Args[1], grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err == nil {
		one := client{cri.NewImageServiceClient(connection), cri.NewRuntimeServiceClient(connection)}
		err = one.call(ctx, os.Args[2], os.Args[3:])
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func (c client) call(ctx context.Context, call string, words []string) error {
	needed := map[string]int{"pull": 1, "run": 3, "time": 6, "exec": 2, "remove": 1, "remove-image": 1, "pods": 0, "usage": 0}
	if least, known := needed[call]; !known || len(words) < least {
		return fmt.Errorf("no such call: %s %q", call, words)
	}
	switch call {
	case "pull":
		reply, err := c.images.PullImage(ctx, &cri.PullImageRequest{Image: &cri.ImageSpec{Image: words[0]}})
		if err != nil {
			return err
		}
		fmt.Println(reply.ImageRef)
		return nil
	case "run":
		return c.run(ctx, words[0], words[1], words[2:])
	case "time":
		return c.timed(ctx, timedPod{
			name: words[0], image: words[1], pulls: words[2] == "pull",
			user: words[3], ready: words[4], command: words[5:],
		})
	case "exec":
		reply, err := c.pods.ExecSync(ctx, &cri.ExecSyncRequest{ContainerId: words[0], Cmd: words[1:]})
		if err != nil {
			return err
		}
		fmt.Print(string(reply.Stdout))
		if reply.ExitCode != 0 {
			return fmt.Errorf("%s (exit code %d)", reply.Stderr, reply.ExitCode)
		}
		return nil
	case "remove":
		if _, err := c.pods.StopPodSandbox(ctx, &cri.StopPodSandboxRequest{PodSandboxId: words[0]}); err != nil {
			return err
		}
		_, err := c.pods.RemovePodSandbox(ctx, &cri.RemovePodSandboxRequest{PodSandboxId: words[0]})
		return err
	case "remove-image":
		_, err := c.images.RemoveImage(ctx, &cri.RemoveImageRequest{Image: &cri.ImageSpec{Image: words[0]}})
		return err
	case "pods":
		reply, err := c.pods.ListPodSandbox(ctx, &cri.ListPodSandboxRequest{})
		if err != nil {
			return err
		}
		for _, pod := range reply.Items {
			fmt.Println(pod.Id)
		}
		return nil
	default:
		return c.usage(ctx)
	}
}

func (c client) run(ctx context.Context, name, image string, words []string) error {
	pod := podConfig(name)
	sandbox, err := c.pods.RunPodSandbox(ctx, &cri.RunPodSandboxRequest{Config: pod})
	if err != nil {
		return err
	}
	container, err := c.pods.CreateContainer(ctx, &cri.CreateContainerRequest{
		PodSandboxId:  sandbox.PodSandboxId,
		SandboxConfig: pod,
		Config:        containerConfig(name, image, words),
	})
	if err != nil {
		return err
	}
	if _, err := c.pods.StartContainer(ctx, &cri.StartContainerRequest{ContainerId: container.ContainerId}); err != nil {
		return err
	}
	fmt.Println(sandbox.PodSandboxId, container.ContainerId)
	return nil
}

// Needs no network plugin: the pod has the network of the host.
func podConfig(name string) *cri.PodSandboxConfig {
	host := &cri.NamespaceOption{Network: cri.NamespaceMode_NODE}
	return &cri.PodSandboxConfig{
		Metadata:     &cri.PodSandboxMetadata{Name: name, Uid: name, Namespace: "test"},
		LogDirectory: os.TempDir(),
		Linux: &cri.LinuxPodSandboxConfig{
			SecurityContext: &cri.LinuxSandboxSecurityContext{NamespaceOptions: host},
		},
	}
}

func containerConfig(name, image string, words []string) *cri.ContainerConfig {
	host := &cri.NamespaceOption{Network: cri.NamespaceMode_NODE}
	return &cri.ContainerConfig{
		Metadata: &cri.ContainerMetadata{Name: "one"},
		Image:    &cri.ImageSpec{Image: image},
		Command:  words,
		LogPath:  name + ".log",
		Linux: &cri.LinuxContainerConfig{
			SecurityContext: &cri.LinuxContainerSecurityContext{NamespaceOptions: host},
		},
	}
}

func (c client) usage(ctx context.Context) error {
	disks, err := c.images.ImageFsInfo(ctx, &cri.ImageFsInfoRequest{})
	if err != nil {
		return err
	}
	for _, disk := range disks.ImageFilesystems {
		fmt.Println(disk.UsedBytes.GetValue(), disk.FsId.GetMountpoint())
	}
	stats, err := c.pods.ListContainerStats(ctx, &cri.ListContainerStatsRequest{})
	if err != nil {
		return err
	}
	for _, one := range stats.Stats {
		fmt.Println(one.WritableLayer.GetUsedBytes().GetValue(), one.Attributes.Id)
	}
	return nil
}
