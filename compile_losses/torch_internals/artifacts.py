"""What ``aot_compile`` saves. Not every torch has it: imported only where something is saved."""

from torch._dynamo import aot_compile_types

#: The base class of a saved function. Torch saves the name of a class that is derived from it, and
#: so imports its module where the function is loaded.
SavedCallable = aot_compile_types.BundledAOTAutogradSerializableCallable
