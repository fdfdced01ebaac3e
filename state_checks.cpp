// Comparisons of Python state with what it was, each of many objects by one call. state_checks.py compiles and calls this.
//
// Functions are called with the GIL held. No code of Python's runs in `holds`, nor any of the user's.

#include <Python.h>

#include <cstring>
#include <memory>
#include <vector>

#include <ATen/core/TensorBase.h>
#include <c10/core/TensorImpl.h>

namespace {

// Where in a tensor object the pointer to its TensorImpl is, in bytes.
Py_ssize_t impl_offset = 0;

c10::TensorImpl* impl_of(PyObject* tensor) {
  return *reinterpret_cast<c10::TensorImpl**>(reinterpret_cast<char*>(tensor) + impl_offset);
}

// Tensors whose metadata is in the TensorImpl itself: reading it calls nobody.
bool is_plain(const c10::TensorImpl& impl) {
  constexpr c10::DispatchKeySet elsewhere({c10::DispatchKey::Python, c10::DispatchKey::NestedTensor,
                                           c10::DispatchKey::Functionalize});
  return !impl.key_set().has_any(elsewhere) && impl.layout() == c10::kStrided && impl.has_storage() &&
         !impl.has_symbolic_sizes_strides();
}

struct Check {
  virtual ~Check() = default;
  virtual bool holds(PyObject* argument) const = 0;
};

// The i-th tensor of the list is like the i-th expected one.
struct Alike final : Check {
  struct Expected {
    PyTypeObject* type;
    uint64_t keys;
    caffe2::TypeMeta dtype;
    c10::Device device;
    bool requires_grad;
    size_t dim, start;
  };
  std::vector<Expected> tensors;
  std::vector<int64_t> numbers;  // sizes and strides of all

  bool add(PyObject* tensor) {
    const auto& impl = *impl_of(tensor);
    if (!is_plain(impl)) return false;
    const auto sizes = impl.sizes(), strides = impl.strides();
    tensors.push_back({Py_TYPE(tensor), impl.key_set().raw_repr(), impl.dtype(), impl.device(), impl.requires_grad(),
                       sizes.size(), numbers.size()});
    numbers.insert(numbers.end(), sizes.begin(), sizes.end());
    numbers.insert(numbers.end(), strides.begin(), strides.end());
    return true;
  }

  bool holds(PyObject* list) const override {
    if (static_cast<size_t>(PyList_GET_SIZE(list)) != tensors.size()) return false;
    PyObject** item = reinterpret_cast<PyListObject*>(list)->ob_item;
    for (const auto& expected : tensors) {
      PyObject* tensor = *item++;
      if (Py_TYPE(tensor) != expected.type) return false;
      const auto& impl = *impl_of(tensor);
      if (impl.key_set().raw_repr() != expected.keys || impl.dtype() != expected.dtype ||
          impl.device() != expected.device || impl.requires_grad() != expected.requires_grad)
        return false;
      const auto sizes = impl.sizes(), strides = impl.strides();
      const int64_t* number = numbers.data() + expected.start;
      const size_t bytes = expected.dim * sizeof(int64_t);
      if (sizes.size() != expected.dim || std::memcmp(sizes.data(), number, bytes) != 0 ||
          std::memcmp(strides.data(), number + expected.dim, bytes) != 0)
        return false;
    }
    return true;
  }
};

// The elements of these tensors begin where they did.
struct InPlace final : Check {
  struct Expected {
    PyObject* tensor;
    const void* data;
    int64_t offset;
    caffe2::TypeMeta dtype;
  };
  std::vector<Expected> tensors;

  static const void* data_of(const c10::TensorImpl& impl) {
    return impl.unsafe_storage().unsafeGetStorageImpl()->data();
  }

  bool add(PyObject* tensor) {
    const auto& impl = *impl_of(tensor);
    if (!is_plain(impl)) return false;
    tensors.push_back({tensor, data_of(impl), impl.storage_offset(), impl.dtype()});
    return true;
  }

  bool holds(PyObject*) const override {
    for (const auto& expected : tensors) {
      const auto& impl = *impl_of(expected.tensor);
      if (!impl.has_storage() || data_of(impl) != expected.data || impl.storage_offset() != expected.offset ||
          impl.dtype() != expected.dtype)
        return false;
    }
    return true;
  }
};

// The `.grad` of these tensors is None.
struct NoGradients final : Check {
  std::vector<PyObject*> leaves;

  bool add(PyObject* leaf) {
    leaves.push_back(leaf);
    return is_plain(*impl_of(leaf));
  }

  bool holds(PyObject*) const override {
    for (PyObject* leaf : leaves) {
      const auto* meta = impl_of(leaf)->autograd_meta();
      // A Tensor is a TensorBase without other members; its own header takes long to compile.
      if (meta && reinterpret_cast<const at::TensorBase&>(meta->grad()).defined()) return false;
    }
    return true;
  }
};

// Words of memory are what they were.
struct Words : Check {
  struct Expected {
    const void* word;
    int64_t value;
  };
  std::vector<Expected> words;

  static int64_t read(const void* word) {
    int64_t value;
    std::memcpy(&value, word, sizeof value);
    return value;
  }

  bool holds(PyObject*) const override {
    for (const auto& expected : words)
      if (read(expected.word) != expected.value) return false;
    return true;
  }
};

// These dictionaries, lists and sets are empty.
struct Empty final : Words {
  bool add(PyObject* container) {
    const void* size = nullptr;
    if (PyDict_Check(container)) size = &reinterpret_cast<PyDictObject*>(container)->ma_used;
    if (PyList_Check(container)) size = &reinterpret_cast<PyVarObject*>(container)->ob_size;
    if (PyAnySet_Check(container)) size = &reinterpret_cast<PySetObject*>(container)->used;
    words.push_back({size, 0});
    return size != nullptr;
  }
};

// Nobody has changed these dictionaries.
struct Versions final : Words {
  bool add(PyObject* dict) {
#if PY_VERSION_HEX < 0x030C0000
    const void* version = &reinterpret_cast<PyDictObject*>(dict)->ma_version_tag;
    words.push_back({version, read(version)});
    return true;
#else  // Python reads versions no more; torch has itself told of changes.
    return false;
#endif
  }
};

// Objects have these classes, and these dictionaries hold their attributes.
struct Attributes final : Check {
  struct Expected {
    PyObject* object;
    PyTypeObject* type;
    PyObject* dict;  // null for an object that makes another one at each look-up
  };
  std::vector<Expected> objects;

  static PyObject* dict_of(PyObject* object) {
    PyObject* dict = PyObject_GenericGetDict(object, nullptr);
    if (dict) Py_DECREF(dict);  // the object holds it
    else PyErr_Clear();
    return dict;
  }

  bool add(PyObject* item) {
    PyObject* object = PyTuple_GET_ITEM(item, 0);
    PyObject* dict = PyTuple_GET_ITEM(item, 2);
    if (dict == Py_None) dict = nullptr;
    objects.push_back({object, reinterpret_cast<PyTypeObject*>(PyTuple_GET_ITEM(item, 1)), dict});
    return !dict || dict_of(object) == dict;
  }

  bool holds(PyObject*) const override {
    for (const auto& expected : objects)
      if (Py_TYPE(expected.object) != expected.type || (expected.dict && dict_of(expected.object) != expected.dict))
        return false;
    return true;
  }
};

template <typename Kind>
Check* make(PyObject* list) {
  try {
    auto check = std::make_unique<Kind>();
    for (Py_ssize_t at = 0; at < PyList_GET_SIZE(list); ++at)
      if (!check->add(PyList_GET_ITEM(list, at))) return nullptr;
    return check.release();
  } catch (...) {  // a tensor that tells nobody of its metadata
    return nullptr;
  }
}

}  // namespace

extern "C" {
void set_impl_offset(Py_ssize_t offset) { impl_offset = offset; }

// Each makes a check of the objects in a list, to which it holds no references; null where one is of another kind.
Check* alike(PyObject* list) { return make<Alike>(list); }
Check* in_place(PyObject* list) { return make<InPlace>(list); }
Check* no_gradients(PyObject* list) { return make<NoGradients>(list); }
Check* empty(PyObject* list) { return make<Empty>(list); }
Check* versions(PyObject* list) { return make<Versions>(list); }
Check* attributes(PyObject* list) { return make<Attributes>(list); }

int holds(const Check* check, PyObject* argument) {
  try {
    return check->holds(argument);
  } catch (...) {
    return 0;
  }
}

void discard(Check* check) { delete check; }
}
