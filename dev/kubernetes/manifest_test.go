// The manifests of dist/kubernetes, read as Kubernetes's own types: an unknown field, a wrong type, and a
// key that comes twice are errors, as for `kubectl apply --validate=strict`.
package kubernetes

import (
	"bufio"
	"bytes"
	"errors"
	"io"
	"os"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer/json"
	utilruntime "k8s.io/apimachinery/pkg/util/runtime"
	"k8s.io/apimachinery/pkg/util/yaml"
)

func objects(t *testing.T, text []byte) ([]runtime.Object, error) {
	t.Helper()
	scheme := runtime.NewScheme()
	utilruntime.Must(appsv1.AddToScheme(scheme))
	utilruntime.Must(corev1.AddToScheme(scheme))
	options := json.SerializerOptions{Yaml: true, Strict: true}
	decoder := json.NewSerializerWithOptions(json.DefaultMetaFactory, scheme, scheme, options)
	documents := yaml.NewYAMLReader(bufio.NewReader(bytes.NewReader(text)))
	var all []runtime.Object
	for {
		document, err := documents.Read()
		if errors.Is(err, io.EOF) {
			return all, nil
		}
		if err != nil {
			return nil, err
		}
		object, _, err := decoder.Decode(document, nil, nil)
		if err != nil {
			return nil, err
		}
		all = append(all, object)
	}
}

func manifest(t *testing.T) []byte {
	t.Helper()
	text, err := os.ReadFile(os.Getenv("MANIFEST"))
	if err != nil {
		t.Fatalf("MANIFEST names no file: %v", err)
	}
	return text
}

func TestManifestIsOfKubernetesTypes(t *testing.T) {
	all, err := objects(t, manifest(t))
	if err != nil {
		t.Fatal(err)
	}
	var namespace *corev1.Namespace
	var set *appsv1.DaemonSet
	for _, object := range all {
		switch object := object.(type) {
		case *corev1.Namespace:
			namespace = object
		case *appsv1.DaemonSet:
			set = object
		default:
			t.Errorf("a %T was not expected", object)
		}
	}
	if namespace == nil || set == nil {
		t.Fatal("a namespace and a DaemonSet belong into it")
	}
	if set.Namespace != namespace.Name {
		t.Errorf("the DaemonSet is in %q, not in %q", set.Namespace, namespace.Name)
	}
	// The server refuses what these three would do.
	selector, err := metav1.LabelSelectorAsSelector(set.Spec.Selector)
	if err != nil {
		t.Fatal(err)
	}
	template := set.Spec.Template
	if selector.Empty() || !selector.Matches(labels.Set(template.Labels)) {
		t.Errorf("%v does not match its own pods", selector)
	}
	if template.Spec.RestartPolicy != "" && template.Spec.RestartPolicy != corev1.RestartPolicyAlways {
		t.Errorf("a DaemonSet's pods restart always, not %q", template.Spec.RestartPolicy)
	}
	for _, container := range append(template.Spec.InitContainers, template.Spec.Containers...) {
		privileged := container.SecurityContext.Privileged
		if container.Image == "" || privileged == nil || !*privileged {
			t.Errorf("%q cannot enter the node", container.Name)
		}
	}
	if !template.Spec.HostPID {
		t.Error("without hostPID there is no process 1 of the node")
	}
}

func TestUnknownFieldIsRefused(t *testing.T) {
	text := bytes.Replace(manifest(t), []byte("hostPID:"), []byte("hostPid:"), 1)
	if _, err := objects(t, text); err == nil {
		t.Error("hostPid is no field of a pod")
	}
}
