// Comparisons of Python state with what it was, each of many objects by one call. state_checks.py compiles and calls this.
//
// Calls hold the GIL. No Python code runs in a check, neither the user's nor ours.

#include <Python.h>
#include <structmember.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include <ATen/core/TensorBase.h>
#include <c10/core/DefaultDtype.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/TensorImpl.h>

// As in ATen/autocast_mode.h, which takes long to compile.
namespace at::autocast {
bool is_autocast_enabled(c10::DeviceType);
at::ScalarType get_autocast_dtype(c10::DeviceType);
bool is_autocast_cache_enabled();
int increment_nesting();
int decrement_nesting();
}  // namespace at::autocast

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

// What a Python object of the type `Check` owns.
struct Comparison {
  virtual ~Comparison() = default;
  virtual bool holds() const = 0;
  // Of what is new at each call.
  virtual bool holds_for(PyObject*) const { return holds(); }
};

struct Check {
  PyObject_HEAD
  const Comparison* comparison;
  PyObject* held;  // what is compared
};

PyTypeObject* check_type = nullptr;

// Several checks hold.
struct All final : Comparison {
  std::vector<const Comparison*> comparisons;

  bool add(PyObject* check) {
    if (!Py_IS_TYPE(check, check_type)) return false;
    comparisons.push_back(reinterpret_cast<Check*>(check)->comparison);
    return true;
  }

  bool holds() const override {
    for (const Comparison* each : comparisons)
      if (!each->holds()) return false;
    return true;
  }
};

int64_t read_word(const void* word) {
  int64_t value;
  std::memcpy(&value, word, sizeof value);
  return value;
}

// The members of a TensorImpl, which its own methods read after a look at whether a subclass has them elsewhere.
struct Members : c10::TensorImpl {
  static const c10::impl::SizesAndStrides& shape(const c10::TensorImpl& impl) {
    return impl.*(&Members::sizes_and_strides_);
  }
  static int64_t offset(const c10::TensorImpl& impl) { return impl.*(&Members::storage_offset_); }
  static uint64_t keys(const c10::TensorImpl& impl) { return (impl.*(&Members::key_set_)).raw_repr(); }
  static int64_t storage(const c10::TensorImpl& impl) { return read_word(&(impl.*(&Members::storage_))); }
  // The pointer to what autograd knows is private. It comes after `storage_`.
  static const c10::AutogradMetaInterface* autograd(const c10::TensorImpl& impl) {
    return reinterpret_cast<const c10::AutogradMetaInterface*>(read_word(&(impl.*(&Members::storage_)) + 1));
  }
  // The dtype, the device, and single bits, among them whether sizes are symbolic: all before `key_set_`.
  static int64_t kind(const c10::TensorImpl& impl) { return read_word(&(impl.*(&Members::data_type_))); }

  // Whether the members are where these functions look for them.
  static bool are_known(const c10::TensorImpl& impl) {
    const auto at = [](const auto& member) { return reinterpret_cast<const char*>(&member); };
    return sizeof(c10::Storage) == sizeof(int64_t) && autograd(impl) == impl.autograd_meta() &&
           at(impl.*(&Members::key_set_)) - at(impl.*(&Members::data_type_)) == sizeof(int64_t);
  }
};

// Tensors are what they were, where they were: the type, the metadata and the address of each.
struct Tensors final : Comparison {
  // What tensors of one kind have in common. A model has few kinds: compared kind by kind, it stays in registers.
  struct Layout {
    PyTypeObject* type;
    uint64_t keys;
    int64_t kind;
    int64_t offset;
    bool requires_grad;
    std::vector<int64_t> sizes, strides;

    auto operator<=>(const Layout&) const = default;
  };
  // Small, because what is compared is read from memory, all of it at each call.
  struct Expected {
    PyObject* tensor;
    const c10::TensorImpl* impl;
    const c10::StorageImpl* storage;
    const void* data;
    const c10::AutogradMetaInterface* autograd;
  };
  std::map<Layout, std::vector<Expected>> tensors;

  static Layout layout_of(PyObject* tensor) {
    const auto& impl = *impl_of(tensor);
    return {Py_TYPE(tensor), Members::keys(impl), Members::kind(impl), Members::offset(impl),
            impl.requires_grad(), impl.sizes().vec(), impl.strides().vec()};
  }

  bool add(PyObject* tensor) {
    const auto* impl = impl_of(tensor);
    if (!is_plain(*impl) || !Members::are_known(*impl)) return false;
    const Layout layout = layout_of(tensor);
    const auto* storage = impl->unsafe_storage().unsafeGetStorageImpl();
    tensors[layout].push_back({tensor, impl, storage, storage->data(), impl->autograd_meta()});
    return true;
  }

  bool holds() const override {
    for (const auto& [layout, alike] : tensors)
      if (!hold(layout, alike, std::make_index_sequence<C10_SIZES_AND_STRIDES_MAX_INLINE_SIZE + 1>())) return false;
    return true;
  }

  // By the number of dimensions: where it is a constant, sizes and strides are compared without a loop.
  template <size_t... dims>
  static bool hold(const Layout& layout, const std::vector<Expected>& alike, std::index_sequence<dims...>) {
    const size_t dim = layout.sizes.size();
    if (dim > C10_SIZES_AND_STRIDES_MAX_INLINE_SIZE) return are_same<-1>(layout, alike);
    return ((dim == dims && are_same<dims>(layout, alike)) || ...);
  }

  template <int dims>
  static bool are_same(const Layout& layout, const std::vector<Expected>& alike) {
    const auto* type = layout.type;
    const auto keys = layout.keys;
    const auto kind = layout.kind, offset = layout.offset;
    const size_t dim = dims < 0 ? layout.sizes.size() : dims;
    const int64_t *sizes = layout.sizes.data(), *strides = layout.strides.data();
    const Py_ssize_t at_impl = impl_offset;
    for (const Expected& expected : alike) {
      const auto& impl = *expected.impl;
      // That the tensor still has this TensorImpl comes first, then that its metadata is still in it.
      if (read_word(reinterpret_cast<char*>(expected.tensor) + at_impl) != reinterpret_cast<int64_t>(&impl) ||
          Py_TYPE(expected.tensor) != type || Members::keys(impl) != keys || Members::kind(impl) != kind ||
          Members::offset(impl) != offset || Members::storage(impl) != reinterpret_cast<int64_t>(expected.storage) ||
          expected.storage->data() != expected.data || Members::autograd(impl) != expected.autograd)
        return false;
      if (expected.autograd && expected.autograd->requires_grad() != layout.requires_grad) return false;
      const auto& shape = Members::shape(impl);
      if (shape.size() != dim) return false;
#pragma GCC unroll 5
      for (size_t at = 0; at < dim; ++at)
        if (shape.sizes_data()[at] != sizes[at] || shape.strides_data()[at] != strides[at]) return false;
    }
    return true;
  }
};

// The tensors in a list are like others, and each is in a storage of its own, which none of the kept tensors has.
struct NewTensors final : Comparison {
  std::vector<Tensors::Layout> tensors;
  std::unordered_set<int64_t> kept;

  bool add(PyObject* alike, PyObject* others) {
    for (Py_ssize_t at = 0; at < PyTuple_GET_SIZE(alike); ++at) {
      PyObject* tensor = PyTuple_GET_ITEM(alike, at);
      if (!is_plain(*impl_of(tensor)) || !Members::are_known(*impl_of(tensor))) return false;
      tensors.push_back(Tensors::layout_of(tensor));
    }
    for (Py_ssize_t at = 0; at < PyTuple_GET_SIZE(others); ++at) {
      const auto* impl = impl_of(PyTuple_GET_ITEM(others, at));
      if (!is_plain(*impl)) return false;
      kept.insert(Members::storage(*impl));
    }
    return true;
  }

  bool holds() const override { return false; }

  bool holds_for(PyObject* list) const override {
    if (!PyList_Check(list) || PyList_GET_SIZE(list) != static_cast<Py_ssize_t>(tensors.size())) return false;
    for (size_t at = 0; at < tensors.size(); ++at) {
      PyObject* tensor = PyList_GET_ITEM(list, at);
      const auto& layout = tensors[at];
      if (Py_TYPE(tensor) != layout.type) return false;
      const auto& impl = *impl_of(tensor);
      if (Members::keys(impl) != layout.keys || Members::kind(impl) != layout.kind) return false;
      if (impl.requires_grad() != layout.requires_grad) return false;
      if (impl.sizes() != c10::IntArrayRef(layout.sizes) || impl.strides() != c10::IntArrayRef(layout.strides))
        return false;
      if (kept.count(Members::storage(impl))) return false;
      for (size_t other = 0; other < at; ++other)
        if (Members::storage(*impl_of(PyList_GET_ITEM(list, other))) == Members::storage(impl)) return false;
    }
    return true;
  }
};

// The `.grad` of these tensors is None.
struct NoGradients final : Comparison {
  std::vector<PyObject*> leaves;

  bool add(PyObject* leaf) {
    leaves.push_back(leaf);
    return Members::are_known(*impl_of(leaf));
  }

  bool holds() const override {
    for (PyObject* leaf : leaves) {
      const auto* meta = Members::autograd(*impl_of(leaf));
      // A Tensor is a TensorBase without other members; its own header takes long to compile.
      if (meta && reinterpret_cast<const at::TensorBase&>(meta->grad()).defined()) return false;
    }
    return true;
  }
};

// Tensors require grad, or do not, as the pairs say.
struct RequireGrad final : Comparison {
  std::vector<std::pair<PyObject*, bool>> leaves;

  bool add(PyObject* item) {
    leaves.emplace_back(PyTuple_GET_ITEM(item, 0), PyTuple_GET_ITEM(item, 1) == Py_True);
    return true;
  }

  bool holds() const override {
    for (const auto& [leaf, required] : leaves)
      if (impl_of(leaf)->requires_grad() != required) return false;
    return true;
  }
};

// Words of memory are what they were.
struct Words : Comparison {
  struct Expected {
    const void* word;
    int64_t value;
  };
  std::vector<Expected> words;

  bool holds() const override {
    for (const auto& expected : words)
      if (read_word(expected.word) != expected.value) return false;
    return true;
  }
};

// Slots of objects hold what they held: triples of the object, the name of the slot and what is in it. Cells and
// functions have slots for their contents, code and defaults.
struct Slots final : Words {
  bool add(PyObject* item) {
    PyObject *object = PyTuple_GET_ITEM(item, 0), *name = PyTuple_GET_ITEM(item, 1), *value = PyTuple_GET_ITEM(item, 2);
    const void* slot = PyFunction_Check(object) ? slot_of_function(object, name) : slot_of(object, name);
    if (PyFunction_Check(object) && value == Py_None) value = nullptr;  // as a function keeps it
    if (slot) words.push_back({slot, reinterpret_cast<int64_t>(value)});
    return slot && read_word(slot) == words.back().value;
  }

  static const void* slot_of_function(PyObject* object, PyObject* name) {
    const auto* function = reinterpret_cast<PyFunctionObject*>(object);
    if (PyUnicode_CompareWithASCIIString(name, "__code__") == 0) return &function->func_code;
    if (PyUnicode_CompareWithASCIIString(name, "__defaults__") == 0) return &function->func_defaults;
    if (PyUnicode_CompareWithASCIIString(name, "__kwdefaults__") == 0) return &function->func_kwdefaults;
    return nullptr;
  }

  static const void* slot_of(PyObject* object, PyObject* name) {
    if (PyCell_Check(object)) return &reinterpret_cast<PyCellObject*>(object)->ob_ref;
    const void* found = nullptr;
    PyObject* slot = PyObject_GetAttr(reinterpret_cast<PyObject*>(Py_TYPE(object)), name);
    if (!slot) PyErr_Clear();
    if (slot && Py_IS_TYPE(slot, &PyMemberDescr_Type))
      found = reinterpret_cast<char*>(object) + reinterpret_cast<PyMemberDescrObject*>(slot)->d_member->offset;
    Py_XDECREF(slot);
    return found;
  }
};

#if PY_VERSION_HEX < 0x030C0000
// Nobody has changed these dictionaries since.
struct Versions final : Words {
  bool add(PyObject* dict) {
    if (!PyDict_Check(dict)) return false;
    const void* version = &reinterpret_cast<PyDictObject*>(dict)->ma_version_tag;
    words.push_back({version, read_word(version)});
    return true;
  }
};
#else
// Whether anybody changed a dictionary since: Python tells of each change before it is made, so that no dictionary is
// read.
struct WatchedDicts {
  std::vector<PyObject*> dicts;
  mutable bool changed = false;

  static inline std::unordered_map<PyObject*, std::vector<WatchedDicts*>> watched;

  static int note(PyDict_WatchEvent, PyObject* dict, PyObject*, PyObject*) {
    if (const auto found = watched.find(dict); found != watched.end())
      for (WatchedDicts* each : found->second) each->changed = true;
    return 0;
  }

  static int watcher() {
    static const int id = PyDict_AddWatcher(note);
    return id;
  }

  bool add(PyObject* dict) {
    if (!PyDict_Check(dict)) return false;
    if (watcher() < 0 || PyDict_Watch(watcher(), dict) < 0) {  // Python has eight watchers for all libraries
      PyErr_Clear();
      return false;
    }
    dicts.push_back(dict);
    watched[dict].push_back(this);
    return true;
  }

  ~WatchedDicts() {
    for (PyObject* dict : dicts) {
      auto& checks = watched[dict];
      checks.erase(std::find(checks.begin(), checks.end(), this));
      if (!checks.empty()) continue;
      watched.erase(dict);
      if (PyDict_Unwatch(watcher(), dict) < 0) PyErr_Clear();
    }
  }
};

// Nobody has changed these dictionaries since.
struct Versions final : Comparison {
  WatchedDicts watch;

  bool add(PyObject* dict) { return watch.add(dict); }

  bool holds() const override { return !watch.changed; }
};
#endif

// These dictionaries, lists and sets are empty.
struct Empty final : Comparison {
  std::vector<const Py_ssize_t*> sizes;
#if PY_VERSION_HEX >= 0x030C0000
  WatchedDicts watch;
#endif

  bool add(PyObject* container) {
#if PY_VERSION_HEX >= 0x030C0000
    if (PyDict_Check(container) && watch.add(container)) {
      watch.changed = true;  // nobody has looked yet
      return true;
    }
#endif
    const Py_ssize_t* size = nullptr;
    if (PyDict_Check(container)) size = &reinterpret_cast<PyDictObject*>(container)->ma_used;
    if (PyList_Check(container)) size = &reinterpret_cast<PyVarObject*>(container)->ob_size;
    if (PyAnySet_Check(container)) size = &reinterpret_cast<PySetObject*>(container)->used;
    sizes.push_back(size);
    return size != nullptr;
  }

  bool holds() const override {
#if PY_VERSION_HEX >= 0x030C0000
    if (watch.changed) {
      for (PyObject* dict : watch.dicts)
        if (reinterpret_cast<PyDictObject*>(dict)->ma_used) return false;
      watch.changed = false;
    }
#endif
    for (const Py_ssize_t* size : sizes)
      if (*size) return false;
    return true;
  }
};

// Objects, or those that weak references refer to, have these classes, and these dictionaries hold their attributes.
struct Attributes final : Comparison {
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

  static PyObject* referred(PyObject* object) {
    return PyWeakref_CheckRefExact(object) ? PyWeakref_GET_OBJECT(object) : object;
  }

  bool add(PyObject* item) {
    PyObject* object = PyTuple_GET_ITEM(item, 0);
    PyObject* dict = PyTuple_GET_ITEM(item, 2);
    if (dict == Py_None) dict = nullptr;
    objects.push_back({object, reinterpret_cast<PyTypeObject*>(PyTuple_GET_ITEM(item, 1)), dict});
    return !dict || dict_of(referred(object)) == dict;
  }

  bool holds() const override {
    for (const auto& expected : objects) {
      PyObject* object = referred(expected.object);
      if (Py_TYPE(object) != expected.type || (expected.dict && dict_of(object) != expected.dict)) return false;
    }
    return true;
  }
};

// This thread has the settings that it had.
struct Settings final : Comparison {
  struct State {
    bool grad, inference, on_cpu, on_gpu, in_region, cache;
    at::ScalarType cpu_dtype, gpu_dtype;
    caffe2::TypeMeta default_dtype;

    bool operator==(const State&) const = default;
  };
  State before;

  static State now() {
    using namespace at::autocast;
    constexpr auto cpu = c10::DeviceType::CPU, gpu = c10::DeviceType::CUDA;
    increment_nesting();
    const bool in_region = decrement_nesting() > 0;
    return {c10::GradMode::is_enabled(), c10::InferenceMode::is_enabled(), is_autocast_enabled(cpu),
            is_autocast_enabled(gpu),    in_region,                       is_autocast_cache_enabled(),
            get_autocast_dtype(cpu),     get_autocast_dtype(gpu),         c10::get_default_dtype()};
  }

  bool add(PyObject*) {
    before = now();
    return true;
  }

  bool holds() const override { return now() == before; }
};

// Lists hold these objects.
struct Items final : Comparison {
  std::vector<std::pair<PyObject*, PyObject*>> lists;

  bool add(PyObject* item) {
    lists.emplace_back(PyTuple_GET_ITEM(item, 0), PyTuple_GET_ITEM(item, 1));
    return PyList_Check(lists.back().first);
  }

  bool holds() const override {
    for (const auto& [list, expected] : lists) {
      const Py_ssize_t count = PyTuple_GET_SIZE(expected);
      if (PyList_GET_SIZE(list) != count) return false;
      if (count && std::memcmp(reinterpret_cast<PyListObject*>(list)->ob_item, &PyTuple_GET_ITEM(expected, 0),
                               count * sizeof(PyObject*)) != 0)
        return false;
    }
    return true;
  }
};

PyObject* call(PyObject* self, PyObject* args, PyObject*) {
  const Comparison& comparison = *reinterpret_cast<Check*>(self)->comparison;
  try {
    return PyBool_FromLong(PyTuple_GET_SIZE(args) ? comparison.holds_for(PyTuple_GET_ITEM(args, 0))
                                                  : comparison.holds());
  } catch (...) {
    Py_RETURN_FALSE;
  }
}

void discard(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  auto* check = reinterpret_cast<Check*>(self);
  PyObject_GC_UnTrack(self);
  delete check->comparison;
  Py_XDECREF(check->held);
  type->tp_free(self);
  Py_DECREF(type);
}

int visit(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(reinterpret_cast<Check*>(self)->held);
  Py_VISIT(Py_TYPE(self));
  return 0;
}

PyObject* owned(std::unique_ptr<Comparison> comparison, PyObject* held) {
  auto* check = PyObject_GC_New(Check, check_type);
  if (!check) return nullptr;
  check->comparison = comparison.release();
  Py_INCREF(held);
  check->held = held;
  PyObject_GC_Track(check);
  return reinterpret_cast<PyObject*>(check);
}

// A check of the objects in a tuple; None where one is of a kind that cannot be compared so.
template <typename Kind>
PyObject* make(PyObject*, PyObject* objects) {
  auto comparison = std::make_unique<Kind>();
  try {
    for (Py_ssize_t at = 0; at < PyTuple_GET_SIZE(objects); ++at)
      if (!comparison->add(PyTuple_GET_ITEM(objects, at))) Py_RETURN_NONE;
  } catch (...) {  // a tensor that tells nobody of its metadata
    Py_RETURN_NONE;
  }
  return owned(std::move(comparison), objects);
}

// The same of tensors in a list: (what they are like, those that are kept). The former are not held.
PyObject* new_tensors(PyObject*, PyObject* both) {
  PyObject *alike = PyTuple_GET_ITEM(both, 0), *kept = PyTuple_GET_ITEM(both, 1);
  auto comparison = std::make_unique<NewTensors>();
  try {
    if (!comparison->add(alike, kept)) Py_RETURN_NONE;
  } catch (...) {
    Py_RETURN_NONE;
  }
  return owned(std::move(comparison), kept);
}

PyObject* set_offset(PyObject*, PyObject* offset) {
  impl_offset = PyLong_AsSsize_t(offset);
  if (PyErr_Occurred()) return nullptr;
  Py_RETURN_NONE;
}

PyMethodDef functions[] = {
    {"set_offset", set_offset, METH_O, nullptr},          {"tensors", make<Tensors>, METH_O, nullptr},
    {"no_gradients", make<NoGradients>, METH_O, nullptr}, {"empty", make<Empty>, METH_O, nullptr},
    {"versions", make<Versions>, METH_O, nullptr},        {"attributes", make<Attributes>, METH_O, nullptr},
    {"items", make<Items>, METH_O, nullptr},              {"slots", make<Slots>, METH_O, nullptr},
    {"require_grad", make<RequireGrad>, METH_O, nullptr}, {"settings", make<Settings>, METH_O, nullptr},
    {"joined", make<All>, METH_O, nullptr},               {"new_tensors", new_tensors, METH_O, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyType_Slot slots[] = {
    {Py_tp_call, reinterpret_cast<void*>(call)},
    {Py_tp_dealloc, reinterpret_cast<void*>(discard)},
    {Py_tp_traverse, reinterpret_cast<void*>(visit)},
    {0, nullptr},
};

PyType_Spec spec = {"compiled_state_checks.Check", sizeof(Check), 0,
                    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION, slots};

PyModuleDef module = {PyModuleDef_HEAD_INIT, "compiled_state_checks", nullptr, -1, functions};

}  // namespace

PyMODINIT_FUNC PyInit_compiled_state_checks() {
  check_type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&spec));
  return check_type ? PyModule_Create(&module) : nullptr;
}
